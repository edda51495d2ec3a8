"""Computes encoders, in which each token attends to all tokens of its prompt: BERT, RoBERTa and ModernBERT shapes."""
