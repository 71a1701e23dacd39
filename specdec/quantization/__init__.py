"""Quantisation schemes: how weights are stored in fewer bits, and the layers that multiply by them."""
