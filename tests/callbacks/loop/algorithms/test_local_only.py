import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from memories import loop_with
from plain_lightning import Numbers, assert_equal, federate, module, ten_clients, trainer, weights

from fedlight import FedAvg, FederatedWrapper, LocalOnly
from fedlight.federation import ClientMemories


def test_the_global_model_stays_and_each_client_has_its_own():
    start = weights(module())
    model, loop = federate(rounds=3, algorithm=LocalOnly(), clients_per_round=10)
    assert_equal(weights(model), start)
    own = {client: loop.own_state(client) for client in loop.clients}
    assert all(not torch.equal(state["net.0.weight"], start["net.0.weight"]) for state in own.values())
    assert not torch.equal(own["c0"]["net.0.weight"], own["c1"]["net.0.weight"])


def test_a_clients_model_is_that_of_a_federation_of_it_alone():
    """With plain SGD without dropout, which remember nothing and draw nothing."""
    plain = {"optimizer": "SGD", "dropout": 0.0}
    _, loop = federate(3, algorithm=LocalOnly(), clients_per_round=10, model=module(**plain))
    for client in ("c0", "c3", "c9"):
        alone, _ = federate(
            3,
            clients=lambda dataset, client=client: {client: ten_clients(dataset)[client]},
            algorithm=FedAvg(),
            clients_per_round=1,
            model=module(**plain),
        )
        assert_equal(loop.own_state(client), weights(alone))


def test_the_model_is_sent_once_and_nothing_comes_back():
    _, loop = federate(rounds=1, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] > 0 and r["bytes_up"] == 0 for r in loop.visit_records)
    _, loop = federate(rounds=2, algorithm=LocalOnly(), clients_per_round=10)
    assert all(r["bytes_down"] == r["bytes_up"] == 0 for r in loop.visit_records)
    assert federate(rounds=1, algorithm=LocalOnly(), clients_per_round=1)[1].own_state("c5") is None


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("limit_mib", [256, 0])
def test_resumed_equals_uninterrupted_with_models_in_ram_and_on_disk(tmp_path, limit_mib):
    def run(folder, ckpt_path=None):
        save = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=True)
        memory = ClientMemories(str(tmp_path / "clients"), limit_mib)
        loop = loop_with(algorithm=LocalOnly(), clients_per_round=5, local_steps=2, memory=memory)
        t = trainer(4, [loop, save], enable_checkpointing=True)
        t.fit(module(), FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
        return {client: loop.own_state(client) for client in loop.clients}

    whole = run(tmp_path / "whole")
    assert any((tmp_path / "clients").glob("*")) == (limit_mib == 0)
    for checkpoint in sorted((tmp_path / "whole").glob("*.ckpt"))[:3]:
        for client, state in run(tmp_path / checkpoint.stem, checkpoint).items():
            if whole[client] is None:
                assert state is None
            else:
                assert_equal(whole[client], state)
