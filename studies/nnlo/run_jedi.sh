#!/bin/bash
#SBATCH --ntasks=7 --time=12:00:00
# As it ran under NNLO: three blocks of a master and a worker, each on a node of its own.
export DATA_CACHE=/tmp
BLOCK=2
srun python3 OptimizationDriver.py --model jedi_torch.py --block-size $BLOCK \
    --mode downpour --optimizer adam --worker-optimizer sgd --loss categorical_crossentropy \
    --epochs 10 --batch 50 --hyper-opt genetic --ga-pop 5 --num-iterations 4 \
    --target-metric "val_acc,>,0.8" --checkpoint jedi 2>&1 | tee jedi.log
