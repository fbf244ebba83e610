"""Which texts say the same: by their characters, or nearly, by the runs of five words that they share."""
