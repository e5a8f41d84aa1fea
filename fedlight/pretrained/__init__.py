"""Pretrained models and their tokenizers.

By folder or hub name (`hub`), and by a short name or GGUF file (`named`); texts open as the tokenizer says (`openings`).
"""
