#!/bin/bash
# As it ran under NNLO: a coordinator, and two blocks of a master and a worker.
mpirun -np 5 python3 OptimizationDriver.py --model mnist_torch.py --block-size 2 \
    --mode gem --gem-lr 0.05 --epochs 6 --batch 50 --num-iterations 4 \
    --early-stopping "val_loss,~<,4" --max-gpus 0 --verbose
