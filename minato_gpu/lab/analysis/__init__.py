"""Where a training script's time goes, and what a change would bring."""
