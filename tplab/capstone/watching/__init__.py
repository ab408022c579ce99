"""Views of a run while it trains.

log_tail     reads the status of the run from its growing log
console      prints the run as lines in a terminal
panel        shows the run as a live view in a notebook or terminal
panel_view   renders that view
"""
