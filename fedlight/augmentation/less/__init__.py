"""LESS: public rows chosen by their gradients."""
