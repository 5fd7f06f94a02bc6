"""OpenAI's interface over one loaded model."""
