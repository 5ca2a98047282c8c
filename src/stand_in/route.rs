//! What a request is about.

use http::Method;
use http::request::Parts;

/// What is asked for, as the log and a [`Fault`](super::Fault) name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Repository,
    RepositoryById,
    Branch,
    ListPulls,
    CreatePull,
    GetPull,
    UpdatePull,
    /// A pull request is made a draft again.
    Withdraw,
    Installation,
    AccessToken,
    /// Git asks which branches there are: before a fetch, and before a push.
    Advertise,
    Fetch,
    Push,
}

/// A request's address, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Rest(Rest),
    Git(Git),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rest {
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
pub(super) struct Git {
    /// `owner/repository`, without `.git`.
    pub(super) name: String,
    /// Below the repository, as git's own server program takes it.
    pub(super) path: String,
}

impl Route {
    /// `None` where GitHub has something, and this stand-in has nothing.
    pub(super) fn find(head: &Parts) -> Option<Self> {
        let path = head.uri.path();
        if let Some((name, rest)) = path.split_once(".git/") {
            let git = Git { name: name.trim_start_matches('/').into(), path: format!("/{rest}") };
            return Some(Self::Git(git));
        }
        // GitHub Enterprise has its API here.
        let path = path.strip_prefix("/api/v3").unwrap_or(path);
        let parts: Vec<_> = path.trim_start_matches('/').split('/').collect();
        rest(&head.method, &parts).map(Self::Rest)
    }

    pub(super) fn operation(&self) -> Operation {
        match self {
            Self::Rest(Rest::Repository { .. }) => Operation::Repository,
            Self::Rest(Rest::RepositoryById { .. }) => Operation::RepositoryById,
            Self::Rest(Rest::Branch { .. }) => Operation::Branch,
            Self::Rest(Rest::ListPulls { .. }) => Operation::ListPulls,
            Self::Rest(Rest::CreatePull { .. }) => Operation::CreatePull,
            Self::Rest(Rest::GetPull { .. }) => Operation::GetPull,
            Self::Rest(Rest::UpdatePull { .. }) => Operation::UpdatePull,
            Self::Rest(Rest::Graph) => Operation::Withdraw,
            Self::Rest(Rest::Installation { .. }) => Operation::Installation,
            Self::Rest(Rest::AccessToken { .. }) => Operation::AccessToken,
            Self::Git(git) => match git.path.as_str() {
                "/git-upload-pack" => Operation::Fetch,
                "/git-receive-pack" => Operation::Push,
                _ => Operation::Advertise,
            },
        }
    }
}

fn rest(method: &Method, parts: &[&str]) -> Option<Rest> {
    let name = |owner: &str, repository: &str| format!("{owner}/{repository}");
    Some(match (method.as_str(), parts) {
        ("GET", ["repos", owner, repo]) => Rest::Repository { name: name(owner, repo) },
        ("GET", ["repositories", id]) => Rest::RepositoryById { id: id.parse().ok()? },
        ("GET", ["repos", owner, repo, "branches", branch @ ..]) if !branch.is_empty() => {
            Rest::Branch { name: name(owner, repo), branch: decoded(&branch.join("/"))? }
        }
        ("GET", ["repos", owner, repo, "pulls"]) => Rest::ListPulls { name: name(owner, repo) },
        ("POST", ["repos", owner, repo, "pulls"]) => Rest::CreatePull { name: name(owner, repo) },
        ("GET", ["repos", owner, repo, "pulls", number]) => {
            Rest::GetPull { name: name(owner, repo), number: number.parse().ok()? }
        }
        ("PATCH", ["repos", owner, repo, "pulls", number]) => {
            Rest::UpdatePull { name: name(owner, repo), number: number.parse().ok()? }
        }
        ("GET", ["repos", owner, repo, "installation"]) => {
            Rest::Installation { name: name(owner, repo) }
        }
        ("POST", ["graphql"] | ["api", "graphql"]) => Rest::Graph,
        ("POST", ["app", "installations", id, "access_tokens"]) => {
            Rest::AccessToken { installation: id.parse().ok()? }
        }
        _ => return None,
    })
}

/// A part of a URL as it was meant: `%2F` is a slash, in a query `+` is a space.
pub(super) fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        match first {
            b'%' => {
                let [high, low, more @ ..] = more else { return None };
                let digits = [*high, *low];
                bytes.push(u8::from_str_radix(str::from_utf8(&digits).ok()?, 16).ok()?);
                rest = more;
            }
            b'+' => bytes.push(b' '),
            byte => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).ok()
}

/// The value of a query's field.
pub(super) fn field(head: &Parts, name: &str) -> Option<String> {
    let query = head.uri.query()?;
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .find_map(|(key, value)| (key == name).then(|| decoded(value)).flatten())
}
