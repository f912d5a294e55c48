"""What a converted model is worth: perplexity, ablations against its teacher, speed."""
