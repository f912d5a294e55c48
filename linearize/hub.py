"""A folder goes to a model repository of the Hugging Face Hub.

`HF_TOKEN` (or `hf auth login`) says who pushes, `HF_ENDPOINT` where to; huggingface_hub reads both.
"""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

# What an earlier version may have left in the repository: other shards, an older index, other code.
REPLACED = ("*.safetensors", "*.safetensors.index.json", "*.py", "adapter/*")
MARK = "linearize_config"  # in config.json: the repository holds a converted model


def check(repo_id: str, *, branch: str | None = None, pull_request: bool = False) -> None:
    """Refuses what no hub would take, before anything is computed.

    Raises:
        ValueError: The name is none, or branch and pull request exclude each other.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"--repo-id: {error}") from None
    if "/" not in repo_id:
        raise ValueError(f"--repo-id: {repo_id!r} has no owner; write owner/{repo_id}")
    if branch is not None and pull_request:
        raise ValueError(
            f"--pull-request: goes to the main branch, and --branch names {branch}; choose one"
        )


def sign_in() -> str:
    """Name of the account whose token is in use.

    Raises:
        ValueError: There is no token, or the hub does not know it.
        ConnectionError: The hub does not answer.
    """
    api = HfApi()
    remedy = f"make one with write access at {api.endpoint}/settings/tokens and set HF_TOKEN"
    if get_token() is None:
        raise ValueError(f"HF_TOKEN: no token was found; {remedy}, or run: hf auth login")
    try:
        return api.whoami()["name"]
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise ValueError(
                f"HF_TOKEN: {api.endpoint} does not accept this token ({code}); {remedy}"
            ) from None
        raise ConnectionError(f"HF_ENDPOINT: {api.endpoint} answers {code}; try later") from None
    except Exception as error:  # the transport has an exception of its own for each mishap
        raise ConnectionError(
            f"HF_ENDPOINT: {api.endpoint} does not answer ({type(error).__name__}); check the "
            "address and the network"
        ) from None


def push(
    folder: Path,
    repo_id: str,
    *,
    private: bool = True,
    branch: str | None = None,
    pull_request: bool = False,
) -> dict[str, Any]:
    """{"repo_id", "url", "commit", "branch", "pull_request"}: where the folder is now.

    A repository that is not there is made; one that holds a converted model is brought up to date.
    Called again after an interruption it sends what is missing.

    Args:
        folder: What is pushed, file for file.
        repo_id: Name of the repository, owner/name; the owner may be an organisation.
        private: Whether a new repository is private.
        branch: A branch, made if it is not there; or refs/pr/N, an open pull request.
        pull_request: Open a pull request instead of changing the main branch.

    Raises:
        ValueError: The token is refused, or the repository is another one than was meant.
        ConnectionError: The hub does not answer, or the upload broke off.
    """
    check(repo_id, branch=branch, pull_request=pull_request)
    sign_in()
    api = HfApi()
    options = ["" if private else " --public", f" --branch {branch}" if branch else ""]
    options.append(" --pull-request" if pull_request else "")
    again = (
        f"the folder is whole, go on with: linearize publish {folder} --repo-id {repo_id}"
        f"{''.join(options)}"
    )
    try:
        _open(api, repo_id, private, branch, pull_request)
        done = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=branch,
            create_pr=pull_request,
            delete_patterns=list(REPLACED),
            commit_message="Publish a linearized model",
        )
    except ValueError:
        raise
    except HfHubHTTPError as error:
        raise _refused(api.endpoint, repo_id, error, again) from None
    except Exception as error:  # as in sign_in
        kind = type(error.__cause__ or error).__name__
        raise ConnectionError(
            f"publish: the upload to {repo_id} broke off ({kind}); {again}"
        ) from error
    return {
        "repo_id": repo_id,
        "url": f"{api.endpoint}/{repo_id}",
        "commit": done.oid,
        "branch": branch,
        "pull_request": done.pr_url if pull_request else None,
    }


def _open(api: HfApi, repo_id: str, private: bool, branch: str | None, pull_request: bool) -> None:
    """Makes repository and branch, or sees to it that the ones there may be written to."""
    try:
        found = api.model_info(repo_id)
    except RepositoryNotFoundError:
        api.create_repo(repo_id, private=private)
    else:
        is_proposal = pull_request or (branch or "").startswith("refs/pr/")
        if private and not found.private and not is_proposal:
            raise ValueError(
                f"--repo-id: {repo_id} exists and everybody can read it; add --public to publish "
                "there, or choose another name"
            )
        files = {file.rfilename for file in found.siblings or ()}
        if branch is None and not pull_request and "config.json" in files:
            config = api.hf_hub_download(repo_id, "config.json")
            if MARK not in Path(config).read_text(encoding="utf-8"):
                raise ValueError(
                    f"--repo-id: {repo_id} exists and holds a model that is not converted; "
                    "choose another name, or add --branch NAME or --pull-request"
                )
    if branch is not None and not branch.startswith("refs/"):
        api.create_branch(repo_id, branch=branch, exist_ok=True)


def _refused(
    endpoint: str, repo_id: str, error: HfHubHTTPError, again: str
) -> ConnectionError | ValueError:
    """What to tell somebody whom the hub said no to; the request, with its token, is left out."""
    code = error.response.status_code
    if code in (401, 403, 404):
        return ValueError(
            f"--repo-id: {endpoint} does not let this token write to {repo_id} ({code}); check "
            "the name of the owner, and that the token has write access"
        )
    said = error.server_message or "no reason given"
    return ConnectionError(
        f"publish: {endpoint} refused the upload to {repo_id} ({code}: {said}); {again}"
    )
