"""Other libraries' engines and arguments: DeepSpeed, FairScale and FSDP1."""
