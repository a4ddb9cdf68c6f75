"""Text shipped with the engine: sentences on which the tokenizer of tiny models is trained."""
