"""Write a trained model as GGUF files with a Modelfile, for llama.cpp, Ollama and LM Studio."""
