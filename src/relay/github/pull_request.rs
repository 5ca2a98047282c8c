//! One pull request for each branch, created or brought up to date.
//!
//! Whatever goes wrong, the way on begins with looking: which pull request is there now? So an answer that was lost, a
//! request that came twice or a crash cannot make a second one.
//!
//! **Invariant:** what people wrote into a pull request stays as it is, byte for byte; the relay changes only what
//! stands between its own marks ([`managed_section`]).
//!
//! **Invariant:** work that needs a review never comes to a pull request that is ready to be merged.
//!
//! **Invariant:** an agent's words name nobody, close nothing and load nothing ([`safe_text`]).

pub mod managed_section;
pub mod safe_text;

use http::Method;
use serde::{Deserialize, Serialize};

use super::client::{GithubClient, GithubError, percent_encode, repository_path};
use super::credential::ForgeCredential;
use crate::base::secret::SecretString;
use crate::relay::repo::repository::HostedRepository;
use crate::relay::repo::review::ReviewReason;
use crate::relay::repo::{ObjectId, SandboxBranch};
use managed_section::NOTICE_MARK;

/// What is to stand on a pull request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequestSpec {
    /// The branch with the work.
    pub head: SandboxBranch,
    /// The branch it is meant for; the repository's default branch where none is named.
    pub base: Option<String>,
    pub run: String,
    pub agent: String,
    /// Of a new pull request; an old one keeps what it has. The agent's words.
    pub title: String,
    /// The agent's words, too.
    pub body: String,
    /// From where to where the run has moved the branch.
    pub moved: (ObjectId, ObjectId),
    /// Whether somebody has to look at it before it counts: a new one is then a draft.
    pub needs_review: bool,
    /// Why.
    pub reasons: Vec<ReviewReason>,
    /// Why somebody has to look at what the branch had before. A pull request that does not say so yet is then a draft, too.
    pub before: Vec<ReviewReason>,
}

/// A pull request that says what it should.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedPullRequest {
    pub number: u64,
    pub url: String,
    pub is_new: bool,
}

/// What is read of a pull request.
#[derive(Debug, Deserialize)]
struct FetchedPullRequest {
    number: u64,
    /// Its name in the API that is not REST. Not every forge that speaks the one has the other.
    #[serde(default)]
    node_id: String,
    html_url: String,
    #[serde(default)]
    draft: bool,
    body: Option<String>,
    head: PullRequestBranch,
    base: PullRequestBranch,
}

#[derive(Debug, Deserialize)]
struct PullRequestBranch {
    #[serde(rename = "ref")]
    branch: String,
    /// `None` where the repository is gone: it was a fork.
    repo: Option<BranchRepository>,
}

#[derive(Debug, Deserialize)]
struct BranchRepository {
    full_name: String,
}

#[derive(Serialize)]
struct CreatePullRequest<'a> {
    title: &'a str,
    head: String,
    base: &'a str,
    body: &'a str,
    draft: bool,
}

#[derive(Serialize)]
struct UpdatePullRequest<'a> {
    body: &'a str,
}

/// Brings the branch's pull request up to date, or makes one.
///
/// # Errors
/// What cannot be helped by trying again for some seconds. [`GithubError::retry_after`] says whether it can be by waiting.
pub async fn publish_pull_request(
    api: &GithubClient,
    credential: &ForgeCredential,
    repository: &HostedRepository,
    order: &PullRequestSpec,
) -> Result<PublishedPullRequest, GithubError> {
    let attempt = |token| async move {
        PullRequestPublisher { api, token, repository, order }.try_publish().await
    };
    let attempts = || credential.with_token(api, repository, attempt);
    Box::pin(api.retry_policy().retry(attempts)).await
}

/// Takes the pull requests of a branch back to drafts, before work is pushed there that needs a review: one that is ready
/// may be merged by itself as soon as the work is there.
///
/// # Errors
/// As [`publish_pull_request`]. Nothing is to be pushed then.
pub async fn convert_to_draft(
    api: &GithubClient,
    credential: &ForgeCredential,
    repository: &HostedRepository,
    branch: &SandboxBranch,
) -> Result<(), GithubError> {
    let attempt = |token: SecretString| async move {
        convert_all_to_draft(api, &token, repository, branch).await
    };
    let attempts = || credential.with_token(api, repository, attempt);
    Box::pin(api.retry_policy().retry(attempts)).await
}

async fn convert_all_to_draft(
    api: &GithubClient,
    token: &SecretString,
    repository: &HostedRepository,
    branch: &SandboxBranch,
) -> Result<(), GithubError> {
    for found in open_pull_requests(api, token, (repository, branch), "").await? {
        make_draft(api, token, &found).await?;
    }
    Ok(())
}

/// Makes a pull request a draft, where it is none yet.
async fn make_draft(
    api: &GithubClient,
    token: &SecretString,
    found: &FetchedPullRequest,
) -> Result<(), GithubError> {
    if found.draft {
        return Ok(());
    }
    match api.graphql_mutation(token, CONVERT_TO_DRAFT_MUTATION, &found.node_id).await {
        // Where there are no drafts, nothing is merged by itself either. The text says that it is to be looked at.
        Err(error) if error.to_string().contains(NO_DRAFTS_MESSAGE) => return Ok(()),
        done => done?,
    }
    tracing::info!(url = found.html_url, "the pull request is a draft again");
    Ok(())
}

/// The open pull requests from a branch, which `more` of a query is about. GitHub is asked for just those, and not
/// believed: what it does not understand in a query, it leaves out, and a fork's branch may have the same name.
async fn open_pull_requests(
    api: &GithubClient,
    token: &SecretString,
    (repository, branch): (&HostedRepository, &SandboxBranch),
    more: &str,
) -> Result<Vec<FetchedPullRequest>, GithubError> {
    let (owner, branch) = (repository.owner(), branch.to_string());
    let query =
        format!("/pulls?state=open&head={owner}%3A{}{more}&per_page=20", percent_encode(&branch));
    let found: Vec<FetchedPullRequest> =
        api.get(token, &repository_path(repository, &query)).await?;
    let own = format!("{owner}/{}", repository.name());
    let is_own = |home: &BranchRepository| home.full_name.eq_ignore_ascii_case(&own);
    let is_it = |one: &FetchedPullRequest| {
        one.head.branch == branch && one.head.repo.as_ref().is_some_and(is_own)
    };
    Ok(found.into_iter().filter(is_it).collect())
}

/// Where one attempt is made.
struct PullRequestPublisher<'a> {
    api: &'a GithubClient,
    token: SecretString,
    repository: &'a HostedRepository,
    order: &'a PullRequestSpec,
}

impl PullRequestPublisher<'_> {
    async fn try_publish(&self) -> Result<PublishedPullRequest, GithubError> {
        let base = match &self.order.base {
            Some(base) => base.clone(),
            None => self.api.repository_info(&self.token, self.repository).await?.default_branch,
        };
        if let Some(found) = self.find_open(&base).await? {
            return self.update_pull_request(found).await;
        }
        let is_draft = self.order.needs_review || !self.order.before.is_empty();
        match self.create_pull_request(&base, is_draft).await {
            // Somebody was faster, or we were and never heard of it.
            Err(error)
                if error.has_problem(|reason| reason.message.contains(ALREADY_EXISTS_MESSAGE)) =>
            {
                let found = self.find_open(&base).await?;
                self.update_pull_request(found.ok_or(GithubError::Unanswered(error.to_string()))?)
                    .await
            }
            // Not every plan has drafts. The text says that it is to be looked at.
            Err(error) if is_draft && error.to_string().contains(NO_DRAFTS_MESSAGE) => {
                self.create_pull_request(&base, false).await
            }
            created => created,
        }
    }

    /// The open pull request from the branch to `base`.
    async fn find_open(&self, base: &str) -> Result<Option<FetchedPullRequest>, GithubError> {
        let more = format!("&base={}", percent_encode(base));
        let place = (self.repository, &self.order.head);
        let found = open_pull_requests(self.api, &self.token, place, &more).await?;
        Ok(found.into_iter().find(|one| one.base.branch == base))
    }

    async fn create_pull_request(
        &self,
        base: &str,
        draft: bool,
    ) -> Result<PublishedPullRequest, GithubError> {
        let title = safe_text::format_title(
            &self.order.title,
            &format!("Changes from {}", self.order.head),
        );
        let body =
            managed_section::upsert_section(None, &self.order.run, &self.body_section(false))
                .unwrap_or_default();
        let head = self.order.head.to_string();
        let create = CreatePullRequest { title: &title, head, base, body: &body, draft };
        let address = repository_path(self.repository, "/pulls");
        let created: FetchedPullRequest =
            self.api.call_once(&self.token, Method::POST, &address, Some(&create)).await?;
        Ok(PublishedPullRequest { number: created.number, url: created.html_url, is_new: true })
    }

    async fn update_pull_request(
        &self,
        found: FetchedPullRequest,
    ) -> Result<PublishedPullRequest, GithubError> {
        let old = found.body.as_deref();
        let words =
            self.body_section(managed_section::has_notice_of_other_run(old, &self.order.run));
        // Whoever has said that it is ready has not read a notice that is not there yet.
        if words.contains(NOTICE_MARK) && !managed_section::has_notice_of_run(old, &self.order.run)
        {
            make_draft(self.api, &self.token, &found).await?;
        }
        let published =
            PublishedPullRequest { number: found.number, url: found.html_url, is_new: false };
        let Some(body) = managed_section::upsert_section(old, &self.order.run, &words) else {
            if words.contains(NOTICE_MARK) {
                return Err(GithubError::Full(published.url));
            }
            tracing::warn!(
                url = published.url,
                "the pull request's text is full; it stays as it is"
            );
            return Ok(published);
        };
        if old == Some(body.as_str()) {
            return Ok(published);
        }
        let address = repository_path(self.repository, &format!("/pulls/{}", found.number));
        let update = UpdatePullRequest { body: &body };
        let _: FetchedPullRequest =
            self.api.call_once(&self.token, Method::PATCH, &address, Some(&update)).await?;
        Ok(published)
    }

    /// What the run has to say: the agent's words, and ours below them. What was there before is told of once.
    fn body_section(&self, is_told: bool) -> String {
        let PullRequestSpec { run, agent, moved: (from, to), .. } = self.order;
        let body = safe_text::format_body(&self.order.body);
        let run = safe_text::format_code(run);
        let agent = if agent.is_empty() {
            String::new()
        } else {
            format!(" of {}", safe_text::format_code(agent))
        };
        let from = if *from == ObjectId::NONE { "nothing".to_owned() } else { format!("`{from}`") };
        let before = if is_told { &[] } else { self.order.before.as_slice() };
        let notice = self.review_notice(&run, before);
        let gap = if body.is_empty() { "" } else { "\n\n" };
        format!("{body}{gap}Run {run}{agent} moved the branch from {from} to `{to}`.{notice}")
    }

    /// What stays for as long as there is room for anything: that somebody has to look, and below it, at what.
    fn review_notice(&self, run: &str, before: &[ReviewReason]) -> String {
        let PullRequestSpec { needs_review, reasons, .. } = self.order;
        let headline = match (needs_review, before.is_empty()) {
            (false, true) => return String::new(),
            (true, true) => {
                format!("The changes of {run} touch what is protected: they need a review.")
            }
            (false, false) => {
                format!("Beside the changes of {run}, the branch has what needs a review.")
            }
            (true, false) => {
                format!("The changes of {run}, and the branch beside them, need a review.")
            }
        };
        let headline = format!("**{headline}**\n");
        let reasons: Vec<_> = reasons.iter().chain(before).collect();
        let listed = reasons.iter().take(MAX_REASONS).map(|ReviewReason { path, why, .. }| {
            let path =
                path.as_ref().map(|path| safe_text::format_code(path) + ": ").unwrap_or_default();
            format!("- {path}{}", safe_text::format_body(why))
        });
        let left = reasons.len().saturating_sub(MAX_REASONS);
        let more = (left > 0).then(|| format!("- and {left} more"));
        let lines = ["\n".to_owned(), NOTICE_MARK.to_owned(), headline].into_iter();
        lines.chain(listed).chain(more).collect::<Vec<_>>().join("\n")
    }
}

const ALREADY_EXISTS_MESSAGE: &str = "A pull request already exists";
const NO_DRAFTS_MESSAGE: &str = "Draft pull requests are not supported";

/// REST can make a draft of nothing that is not one.
const CONVERT_TO_DRAFT_MUTATION: &str = "mutation($id: ID!) { convertPullRequestToDraft(input: {pullRequestId: $id}) { pullRequest { isDraft } } }";

/// More than that is read where the work is.
const MAX_REASONS: usize = 10;
