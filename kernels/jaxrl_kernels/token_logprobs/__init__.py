"""Log-probability and entropy of given tokens from hidden states, without the logits of a whole batch."""
