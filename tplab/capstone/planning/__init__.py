"""What the formulas of earlier chapters predict for a run, before its first step."""
