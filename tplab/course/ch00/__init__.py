"""What chapter 00 asks: the memory bill of a GPT."""
