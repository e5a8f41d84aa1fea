"""Fine-tune a model in a folder on lists of texts: who said it, the question, and the answer to learn."""

import lightning as L

from fedlight import AdapterExport, FederatedLoop, InstructionDataModule, SFTModule

clients = ["ann", "ann", "ben", "ben"]
questions = ["is anna kind ?", "is ben rude ?", "is anna kind ?", "is ben rude ?"]
answers = ["anna bakes cakes", "ben reads poems", "anna is kind", "ben is plain"]
texts = zip(clients, questions, answers, strict=True)
rows = [{"client": c, "instruction": q, "response": a} for c, q, a in texts]
data = InstructionDataModule(rows, tokenizer="my_model", batch_size=2)
parts = [FederatedLoop(clients_per_round=2), AdapterExport("my_adapter")]
L.Trainer(max_epochs=3, callbacks=parts, log_every_n_steps=1).fit(SFTModule("my_model", lr=1e-3), data)
