"""What chapter 01 asks."""
