"""A run of benchlib as a TorchX application: torchx run --scheduler local_cwd torchx_app.py:app"""

import torchx.specs as specs


def app() -> specs.AppDef:
    """Describe the run: one replica per node."""
    role = specs.Role(
        name="node",
        image='/outputs/example/squad-app',
        entrypoint="bash",
        args=["-c", 'PET_RDZV_ENDPOINT="$${${rank0_env}:=localhost}:29400" PET_RDZV_CONF="join_timeout=120,last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5,is_host=$$((${replica_id} == 0))" exec python3 -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id benchlib-squad-app --max-restarts 0 --monitor-interval 0.2 --log-dir /outputs/example/squad-app/logs/torchrun -m benchlib.runtime.worker /outputs/example/squad-app'],
        num_replicas=2,
        resource=specs.resource(cpu=2, gpu=0, memMB=1024),
        env={'BENCHLIB_RUN_DIR': '/outputs/example/squad-app', 'PYTHONUNBUFFERED': '1', 'TORCH_DISABLE_SHARE_RDZV_TCP_STORE': '1'},
        mounts=specs.parse_mounts([]),
        port_map={"c10d": 29400},
    )
    return specs.AppDef(name='benchlib-squad-app', roles=[role])
