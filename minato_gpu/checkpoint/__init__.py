"""Epochs' positions as plain data, and back (``DataLoader.state_dict``); states of ranks, merged and split."""
