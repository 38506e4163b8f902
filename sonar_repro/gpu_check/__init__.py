"""One run on one GPU that proves what a CPU cannot: ``python -m sonar_repro.gpu_check`` (``make gpu-check``).

It needs torch with CUDA and transformers, no network and no hub files: OLMoE is built at full size with random weights.
hydra-core, omegaconf and antlr4 may come from a folder of wheels. Within its minutes it measures memory and time of the
methods on every expert kernel that imports, runs the weight comparisons on fewer layers and two allocator caps, and
forecasts the same arms: measurement is printed beside forecast. Everything ends in one tar file.
"""
