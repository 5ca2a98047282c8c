//! Pull requests, as they are kept and as they are shown.

use serde_json::{Value, json};

/// One pull request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pull {
    pub number: u64,
    pub title: String,
    pub body: Option<String>,
    /// The branch with the work, in the same repository.
    pub head: String,
    /// The branch it is meant for.
    pub base: String,
    pub is_draft: bool,
    pub is_open: bool,
}

/// Where a pull request is shown: what it does not know itself.
pub(super) struct Place<'a> {
    pub(super) url: &'a str,
    pub(super) repository: &'a str,
    pub(super) id: u64,
    pub(super) head: &'a str,
    pub(super) base: &'a str,
}

impl Pull {
    pub(super) fn shown(&self, place: &Place<'_>) -> Value {
        let Place { url, repository, id, head, base } = place;
        let number = self.number;
        json!({
            "id": 1000 + number,
            "number": number,
            "url": format!("{url}/repos/{repository}/pulls/{number}"),
            "html_url": format!("{url}/{repository}/pull/{number}"),
            "state": if self.is_open { "open" } else { "closed" },
            "draft": self.is_draft,
            "title": self.title,
            "body": self.body,
            "head": side(repository, *id, &self.head, head),
            "base": side(repository, *id, &self.base, base),
        })
    }
}

fn side(repository: &str, id: u64, branch: &str, sha: &str) -> Value {
    let owner = repository.split('/').next().unwrap_or_default();
    json!({
        "label": format!("{owner}:{branch}"),
        "ref": branch,
        "sha": sha,
        "repo": { "id": id, "full_name": repository },
    })
}
