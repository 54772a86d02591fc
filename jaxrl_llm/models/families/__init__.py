"""One small file per model family: its Hugging Face config, defaults and tensor names."""
