//! Routes: the operation that a request's method and path name.

use http::Method;
use http::request::Parts;
use percent_encoding::percent_decode_str;

/// The operation of a request, as the log and a [`FaultRule`](super::FaultRule) name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GithubOperation {
    Repository,
    RepositoryById,
    Branch,
    ListPulls,
    CreatePull,
    GetPull,
    UpdatePull,
    /// A pull request becomes a draft again.
    Withdraw,
    Installation,
    AccessToken,
    /// Git lists the branches: before a fetch, and before a push.
    Advertise,
    Fetch,
    Push,
}

/// The route of a request, with the parts of its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FakeGithubRoute {
    Rest(RestRoute),
    Git(GitRoute),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RestRoute {
    Repository { name: String },
    RepositoryById { id: u64 },
    Branch { name: String, branch: String },
    ListPulls { name: String },
    CreatePull { name: String },
    GetPull { name: String, number: u64 },
    UpdatePull { name: String, number: u64 },
    Installation { name: String },
    AccessToken { installation: u64 },
    Graph,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct GitRoute {
    /// `owner/repository`, without `.git`.
    pub(super) name: String,
    /// The path below the repository, as git's server program expects it.
    pub(super) path: String,
}

impl FakeGithubRoute {
    /// Matches a request. Returns `None` for routes of GitHub that this fake server does not have.
    pub(super) fn match_route(head: &Parts) -> Option<Self> {
        let path = head.uri.path();
        // Git's addresses are recognized by the repository's suffix.
        if let Some((name, rest)) = path.split_once(".git/") {
            let git =
                GitRoute { name: name.trim_start_matches('/').into(), path: format!("/{rest}") };
            return Some(Self::Git(git));
        }
        // GitHub Enterprise has its API below this path.
        let path = path.strip_prefix("/api/v3").unwrap_or(path);
        let parts: Vec<_> = path.trim_start_matches('/').split('/').collect();
        match_rest(&head.method, &parts).map(Self::Rest)
    }

    pub(super) fn operation(&self) -> GithubOperation {
        match self {
            Self::Rest(RestRoute::Repository { .. }) => GithubOperation::Repository,
            Self::Rest(RestRoute::RepositoryById { .. }) => GithubOperation::RepositoryById,
            Self::Rest(RestRoute::Branch { .. }) => GithubOperation::Branch,
            Self::Rest(RestRoute::ListPulls { .. }) => GithubOperation::ListPulls,
            Self::Rest(RestRoute::CreatePull { .. }) => GithubOperation::CreatePull,
            Self::Rest(RestRoute::GetPull { .. }) => GithubOperation::GetPull,
            Self::Rest(RestRoute::UpdatePull { .. }) => GithubOperation::UpdatePull,
            Self::Rest(RestRoute::Graph) => GithubOperation::Withdraw,
            Self::Rest(RestRoute::Installation { .. }) => GithubOperation::Installation,
            Self::Rest(RestRoute::AccessToken { .. }) => GithubOperation::AccessToken,
            Self::Git(git) => match git.path.as_str() {
                "/git-upload-pack" => GithubOperation::Fetch,
                "/git-receive-pack" => GithubOperation::Push,
                _ => GithubOperation::Advertise,
            },
        }
    }
}

fn match_rest(method: &Method, parts: &[&str]) -> Option<RestRoute> {
    let name = |owner: &str, repository: &str| format!("{owner}/{repository}");
    Some(match (method.as_str(), parts) {
        ("GET", ["repos", owner, repo]) => RestRoute::Repository { name: name(owner, repo) },
        ("GET", ["repositories", id]) => RestRoute::RepositoryById { id: id.parse().ok()? },
        // A branch's name may contain slashes, encoded or not.
        ("GET", ["repos", owner, repo, "branches", branch @ ..]) if !branch.is_empty() => {
            RestRoute::Branch {
                name: name(owner, repo),
                branch: percent_decode(&branch.join("/"))?,
            }
        }
        ("GET", ["repos", owner, repo, "pulls"]) => {
            RestRoute::ListPulls { name: name(owner, repo) }
        }
        ("POST", ["repos", owner, repo, "pulls"]) => {
            RestRoute::CreatePull { name: name(owner, repo) }
        }
        ("GET", ["repos", owner, repo, "pulls", number]) => {
            RestRoute::GetPull { name: name(owner, repo), number: number.parse().ok()? }
        }
        ("PATCH", ["repos", owner, repo, "pulls", number]) => {
            RestRoute::UpdatePull { name: name(owner, repo), number: number.parse().ok()? }
        }
        ("GET", ["repos", owner, repo, "installation"]) => {
            RestRoute::Installation { name: name(owner, repo) }
        }
        ("POST", ["graphql"] | ["api", "graphql"]) => RestRoute::Graph,
        ("POST", ["app", "installations", id, "access_tokens"]) => {
            RestRoute::AccessToken { installation: id.parse().ok()? }
        }
        _ => return None,
    })
}

/// Decodes a part of a URL: `%2F` is a slash, and `+` is a space in a query.
pub(super) fn percent_decode(text: &str) -> Option<String> {
    Some(percent_decode_str(&text.replace('+', " ")).decode_utf8().ok()?.into_owned())
}

/// Returns the decoded value of a query's field.
pub(super) fn query_field(head: &Parts, name: &str) -> Option<String> {
    let query = head.uri.query()?;
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find_map(|(key, value)| (key == name).then(|| percent_decode(value)).flatten())
}
