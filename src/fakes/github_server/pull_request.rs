//! Pull requests, as they are stored and as the API returns them.

use serde_json::{Value, json};

/// A pull request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FakePullRequest {
    pub number: u64,
    pub title: String,
    pub body: Option<String>,
    /// The branch with the work, in the same repository.
    pub head: String,
    /// The branch into which the work is to be merged.
    pub base: String,
    pub is_draft: bool,
    pub is_open: bool,
    /// The repository of the branch, if it is another one. The name is empty if that repository was deleted.
    pub fork: Option<String>,
}

/// The data around a pull request that its JSON needs.
pub(super) struct PullRequestContext<'a> {
    pub(super) url: &'a str,
    pub(super) repository: &'a str,
    pub(super) id: u64,
    pub(super) head: &'a str,
    pub(super) base: &'a str,
}

impl FakePullRequest {
    /// Returns the global id of the pull request. `id` is the id of its repository.
    pub(super) fn node_id(&self, id: u64) -> String {
        format!("PR_{id}_{}", self.number)
    }

    pub(super) fn to_json(&self, place: &PullRequestContext<'_>) -> Value {
        let PullRequestContext { url, repository, id, head, base } = place;
        let number = self.number;
        json!({
            "id": 1000 + number,
            "number": number,
            "node_id": self.node_id(*id),
            "url": format!("{url}/repos/{repository}/pulls/{number}"),
            "html_url": format!("{url}/{repository}/pull/{number}"),
            "state": if self.is_open { "open" } else { "closed" },
            "draft": self.is_draft,
            "title": self.title,
            "body": self.body,
            "head": side_json(self.fork.as_deref().unwrap_or(repository), *id, &self.head, head),
            "base": side_json(repository, *id, &self.base, base),
        })
    }
}

fn side_json(repository: &str, id: u64, branch: &str, sha: &str) -> Value {
    let owner = repository.split('/').next().unwrap_or_default();
    json!({
        "label": format!("{owner}:{branch}"),
        "ref": branch,
        "sha": sha,
        // GitHub returns null for a deleted fork.
        "repo": (!repository.is_empty()).then(|| json!({ "id": id, "full_name": repository })),
    })
}
