"""Divergence between a student's and a teacher's next-token distributions, without the logits of a whole batch."""
