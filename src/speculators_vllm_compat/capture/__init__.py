"""The worker's side: layers are observed while the model's own forward runs."""
