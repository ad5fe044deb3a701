"""Operations on a model: structure, copies, state, and in-place replacement of modules."""
