"""Shows a run while it trains: as lines of text, and as a panel in a notebook."""
