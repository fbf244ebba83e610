"""What watches a run while it trains: metrics, guards, recovery."""
