"""Where an epoch stands, as plain data, and back: what ``DataLoader.state_dict`` is made of. Ranks merged and split."""
