"""PatrickStar's interface over chunked memory: its configuration, profiler and tools.

The guide's snippets work with `atorch.patrickstar` for `patrickstar` (Fang et al., "PatrickStar: Parallel Training
of Pre-trained Models via Chunk-based Dynamic Memory Management", arXiv 2108.05818; github.com/Tencent/PatrickStar).
"""
