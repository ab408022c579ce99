"""The checks, predictions and symptoms of each chapter: chNN holds those of chapter NN."""
