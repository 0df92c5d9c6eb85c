"""The models branch: one decoder for every family, and the readers of what people have on disk."""
