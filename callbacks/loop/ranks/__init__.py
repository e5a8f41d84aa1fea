"""Parts of the loop for several processes.

`ranks` gives every process the results of all, and `split_steps` divides the steps of a client that several processes train.
"""
