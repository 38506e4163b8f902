# A CUDA image with every extra that the package index has; the expert kernels are in docs/paper_scale.md.
#   docker build -t sonar_repro .
#   docker run --gpus all -v $PWD/runs:/work/runs -v $HOME/.cache/huggingface:/root/.cache/huggingface sonar_repro \
#     python -m sonar_repro +experiment=table1 scale=paper
FROM nvidia/cuda:12.9.1-devel-ubuntu24.04
ENV DEBIAN_FRONTEND=noninteractive PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
RUN apt-get update && apt-get install --no-install-recommends -y python3 python3-venv python3-dev git make g++ \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/venv
WORKDIR /work
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e '.[bnb,eval,slurm]'
CMD ["python", "-m", "sonar_repro", "task=doctor"]
