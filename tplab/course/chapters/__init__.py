"""The checks, predictions and symptoms of each chapter, in package chNN for chapter NN."""
