//! The REST API: repositories, branches, pull requests, and tokens for apps.

use std::time::{Duration, UNIX_EPOCH};

use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};

use super::hub::{FakeGithubHandle, FakeGithubState, FakeRepository};
use super::pull_request::{FakePullRequest, PullRequestContext};
use super::reply::FakeResponse;
use super::route::{RestRoute, query_field};

use crate::base::timestamp;

/// The body of a request for a new pull request.
#[derive(Deserialize)]
struct CreatePullBody {
    title: String,
    head: String,
    base: String,
    body: Option<String>,
    #[serde(default)]
    draft: bool,
}

/// The body of a request that changes a pull request.
#[derive(Deserialize)]
struct UpdatePullBody {
    title: Option<String>,
    body: Option<String>,
    state: Option<String>,
}

/// The scope of the token that an app requests.
#[derive(Default, Deserialize)]
struct InstallationTokenScope {
    repositories: Option<Vec<String>>,
    permissions: Option<Value>,
}

pub(super) fn handle_rest(
    hub: &FakeGithubHandle,
    ask: &RestRoute,
    head: &Parts,
    body: &[u8],
) -> FakeResponse {
    let mut state = hub.lock_state();
    // 1. Apps sign their requests, so that these routes have their own authentication.
    let name = match ask {
        RestRoute::AccessToken { installation } => {
            return issue_token_reply(&mut state, head, *installation, body);
        }
        RestRoute::Graph => return convert_to_draft(&mut state, head, body),
        RestRoute::Installation { name } => return installation_reply(&state, head, name),
        RestRoute::RepositoryById { id } => {
            let found = state.repositories.iter().find(|(_, found)| found.id == *id);
            let Some((name, _)) = found else { return FakeResponse::not_found() };
            name.clone()
        }
        RestRoute::Repository { name }
        | RestRoute::Branch { name, .. }
        | RestRoute::ListPulls { name }
        | RestRoute::CreatePull { name }
        | RestRoute::GetPull { name, .. }
        | RestRoute::UpdatePull { name, .. } => name.clone(),
    };
    // 2. An unknown token learns nothing, not even that a repository has moved.
    if !state.access.knows_token(head) {
        return FakeResponse::bad_credentials();
    }
    if let Some(id) = state.moved.get(&name) {
        return moved_reply(hub.url(), *id, head);
    }
    // 3. A repository without access looks like a missing one, as on GitHub.
    if !state.access.can_access(head, &name) {
        return FakeResponse::not_found();
    }
    let Some(repository) = state.repositories.get_mut(&name) else {
        return FakeResponse::not_found();
    };
    let place = RepositoryView { url: hub.url(), name: &name };
    match ask {
        RestRoute::Branch { branch, .. } => branch_reply(repository, branch),
        RestRoute::ListPulls { .. } => place.list_pulls(repository, head),
        RestRoute::CreatePull { .. } => match serde_json::from_slice(body) {
            Ok(create) => place.create_pull(repository, create),
            Err(_) => FakeResponse::error(StatusCode::BAD_REQUEST, "Problems parsing JSON"),
        },
        RestRoute::GetPull { number, .. } => match find_pull(repository, *number) {
            Some(pull) => FakeResponse::ok(&place.pull_json(repository, pull)),
            None => FakeResponse::not_found(),
        },
        RestRoute::UpdatePull { number, .. } => match serde_json::from_slice(body) {
            Ok(update) => place.update_pull(repository, *number, update),
            Err(_) => FakeResponse::error(StatusCode::BAD_REQUEST, "Problems parsing JSON"),
        },
        _ => place.repository_reply(repository),
    }
}

/// The URL and the name under which the answers show a repository.
struct RepositoryView<'a> {
    url: &'a str,
    name: &'a str,
}

impl RepositoryView<'_> {
    fn repository_reply(&self, repository: &FakeRepository) -> FakeResponse {
        let Self { url, name } = self;
        FakeResponse::ok(&json!({
            "id": repository.id,
            "full_name": name,
            "html_url": format!("{url}/{name}"),
            "clone_url": format!("{url}/{name}.git"),
            "default_branch": repository.default_branch(),
            "archived": false,
        }))
    }

    fn pull_json(&self, repository: &FakeRepository, pull: &FakePullRequest) -> Value {
        pull.to_json(&PullRequestContext {
            url: self.url,
            repository: self.name,
            id: repository.id,
            head: &repository.branch_tip(&pull.head).unwrap_or_default(),
            base: &repository.branch_tip(&pull.base).unwrap_or_default(),
        })
    }

    fn list_pulls(&self, repository: &FakeRepository, head: &Parts) -> FakeResponse {
        let state = query_field(head, "state").unwrap_or_else(|| "open".to_owned());
        let owner = self.name.split('/').next().unwrap_or_default();
        let (from, to) = (query_field(head, "head"), query_field(head, "base"));
        let is_asked_for = |pull: &&FakePullRequest| {
            (state == "all" || pull.is_open == (state == "open"))
                && from.as_ref().is_none_or(|from| *from == format!("{owner}:{}", pull.head))
                && to.as_ref().is_none_or(|to| *to == pull.base)
        };
        // GitHub lists the newest pull request first.
        let found: Vec<_> = repository.pulls.iter().rev().filter(is_asked_for).collect();
        let number =
            |name, or| query_field(head, name).and_then(|text| text.parse().ok()).unwrap_or(or);
        let (page, per_page) = (number("page", 1), number("per_page", 30).min(MAX_PER_PAGE));
        let end = page * per_page;
        let shown = found.iter().take(end).skip(end.saturating_sub(per_page));
        let reply = FakeResponse::ok(&shown.map(|pull| self.pull_json(repository, pull)).collect());
        if found.len() <= end {
            return reply;
        }
        let next = format!("{}/repositories/{}/pulls?page={}", self.url, repository.id, page + 1);
        reply.with_header("link", format!("<{next}>; rel=\"next\""))
    }

    fn create_pull(&self, repository: &mut FakeRepository, create: CreatePullBody) -> FakeResponse {
        let CreatePullBody { title, head, base, body, draft } = create;
        let owner = self.name.split('/').next().unwrap_or_default();
        // `owner:branch` of the same owner means a branch of this repository.
        let head = head.strip_prefix(&format!("{owner}:")).unwrap_or(&head).to_owned();
        let Some(tip) = repository.branch_tip(&head) else {
            return FakeResponse::invalid("PullRequest", "head");
        };
        let Some(floor) = repository.branch_tip(&base) else {
            return FakeResponse::invalid("PullRequest", "base");
        };
        // GitHub refuses a pull request without commits, and a second one for the same branches.
        if tip == floor {
            let message = format!("No commits between {base} and {head}");
            return FakeResponse::refused("PullRequest", &message);
        }
        let is_same = |pull: &FakePullRequest| {
            pull.is_open && pull.fork.is_none() && pull.head == head && pull.base == base
        };
        if repository.pulls.iter().any(is_same) {
            let message = format!("A pull request already exists for {owner}:{head}.");
            return FakeResponse::refused("PullRequest", &message);
        }
        let number = repository.pulls.len() as u64 + 1;
        let pull = FakePullRequest {
            number,
            title,
            body,
            head,
            base,
            is_draft: draft,
            is_open: true,
            fork: None,
        };
        let shown = self.pull_json(repository, &pull);
        repository.pulls.push(pull);
        FakeResponse::json(StatusCode::CREATED, &shown)
            .with_header("location", format!("{}/repos/{}/pulls/{number}", self.url, self.name))
    }

    fn update_pull(
        &self,
        repository: &mut FakeRepository,
        number: u64,
        update: UpdatePullBody,
    ) -> FakeResponse {
        let pull = repository.pulls.iter_mut().find(|pull| pull.number == number);
        let Some(pull) = pull else { return FakeResponse::not_found() };
        // A field that is missing in the request stays unchanged.
        pull.title = update.title.unwrap_or_else(|| pull.title.clone());
        pull.body = update.body.or_else(|| pull.body.take());
        pull.is_open = update.state.map_or(pull.is_open, |state| state == "open");
        let pull = pull.clone();
        FakeResponse::ok(&self.pull_json(repository, &pull))
    }
}

/// Executes the only supported GraphQL mutation: it makes a pull request a draft.
fn convert_to_draft(state: &mut FakeGithubState, head: &Parts, body: &[u8]) -> FakeResponse {
    if !state.access.knows_token(head) {
        return FakeResponse::bad_credentials();
    }
    let asked: Value = serde_json::from_slice(body).unwrap_or_default();
    // The query is not parsed: the relay sends only this mutation.
    let is_known =
        asked["query"].as_str().is_some_and(|query| query.contains("convertPullRequestToDraft"));
    let mut all = state.repositories.values_mut().flat_map(|repository| {
        let id = repository.id;
        repository.pulls.iter_mut().map(move |pull| (pull.node_id(id), pull))
    });
    match all.find(|(node, _)| is_known && asked["variables"]["id"] == node.as_str()) {
        Some((_, pull)) => {
            pull.is_draft = true;
            let pull = json!({ "pullRequest": { "isDraft": true } });
            FakeResponse::ok(&json!({ "data": { "convertPullRequestToDraft": pull } }))
        }
        None => FakeResponse::graphql_error("NOT_FOUND", "Could not resolve to a node"),
    }
}

fn find_pull(repository: &FakeRepository, number: u64) -> Option<&FakePullRequest> {
    repository.pulls.iter().find(|pull| pull.number == number)
}

fn branch_reply(repository: &FakeRepository, branch: &str) -> FakeResponse {
    let Some(sha) = repository.branch_tip(branch) else {
        return FakeResponse::error(StatusCode::NOT_FOUND, "Branch not found");
    };
    let is_protected = repository.protected.iter().any(|one| one == branch);
    FakeResponse::ok(
        &json!({ "name": branch, "commit": { "sha": sha }, "protected": is_protected }),
    )
}

fn moved_reply(url: &str, id: u64, head: &Parts) -> FakeResponse {
    // The path below the repository's name is the same below its id.
    let rest = head.uri.path().splitn(5, '/').nth(4);
    let rest = rest.map_or_else(String::new, |rest| format!("/{rest}"));
    let location = format!("{url}/repositories/{id}{rest}");
    let status = StatusCode::MOVED_PERMANENTLY;
    let body = json!({
        "message": "Moved Permanently",
        "url": location,
        "documentation_url": "https://docs.github.com/rest/guides/best-practices-for-using-the-rest-api#follow-redirects",
    });
    FakeResponse::json(status, &body).with_header("location", location)
}

fn installation_reply(state: &FakeGithubState, head: &Parts, name: &str) -> FakeResponse {
    let Some(app) = state.access.find_app(head) else { return bad_signature() };
    if !app.names.iter().any(|one| one == name) {
        return FakeResponse::not_found();
    }
    FakeResponse::ok(&json!({ "id": app.installation, "app_id": 1, "target_type": "Organization" }))
}

fn issue_token_reply(
    state: &mut FakeGithubState,
    head: &Parts,
    installation: u64,
    body: &[u8],
) -> FakeResponse {
    let Some(app) = state.access.find_app(head).cloned() else { return bad_signature() };
    // An app cannot request tokens of another app's installation.
    if app.installation != installation {
        return FakeResponse::not_found();
    }
    let scope: InstallationTokenScope = serde_json::from_slice(body).unwrap_or_default();
    let names = match &scope.repositories {
        None => app.names,
        // The scope has names without the owner.
        Some(asked) => {
            let is_asked_for =
                |name: &&String| asked.iter().any(|one| name.ends_with(&format!("/{one}")));
            app.names.iter().filter(is_asked_for).cloned().collect()
        }
    };
    // GitHub refuses a token without repositories, in these words.
    if names.is_empty() {
        return FakeResponse::error(
            StatusCode::UNPROCESSABLE_ENTITY,
            "There is at least one repository that does not exist or is not accessible to the parent installation.",
        );
    }
    let (token, expires) = state.access.issue_token(names);
    let expires = UNIX_EPOCH + Duration::from_secs(expires);
    FakeResponse::json(
        StatusCode::CREATED,
        &json!({
            "token": token,
            "expires_at": timestamp::format_rfc3339_seconds(expires).to_string(),
            "permissions": scope.permissions,
            "repository_selection": "selected",
        }),
    )
}

fn bad_signature() -> FakeResponse {
    FakeResponse::error(StatusCode::UNAUTHORIZED, "A JSON web token could not be decoded")
}

/// The most pull requests on one page, as of GitHub.
const MAX_PER_PAGE: usize = 100;
