"""Evaluation: what drafting brings on real prompts, and whether the output stayed the same."""
