"""Side by side with peers, in one run. `make bench` prints the tables."""
