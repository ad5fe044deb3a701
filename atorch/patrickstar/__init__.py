"""PatrickStar's front door: its configuration, profiler and tools, over chunked memory.

The guide's snippets hold with `patrickstar` read as `atorch.patrickstar` (Fang et al., "PatrickStar: Parallel Training
of Pre-trained Models via Chunk-based Dynamic Memory Management", arXiv 2108.05818; github.com/Tencent/PatrickStar).
"""
