"""Trained drafters: their data, training and checkpoints. Only the training modules import torch."""
