"""From a config and a machine to numbers: precision, batch, accumulation, loss head."""
