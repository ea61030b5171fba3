"""``mtraining recall``: recall of held-out rows against density, for every selection, on a user's model and text."""
