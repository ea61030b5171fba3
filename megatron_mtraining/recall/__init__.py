"""``mtraining recall``: recall of held-out rows against density, for every selection, on a model and text of the user."""
