"""The zoo: gradstow tried on every model that people are likely to train. ``python benchmarks/zoo`` runs it."""
