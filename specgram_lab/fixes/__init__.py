"""Which of the fixes for drafts under a grammar a vLLM build contains, told from its code, and what follows."""
