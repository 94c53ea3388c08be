"""Problems and texts for training and evaluation."""
