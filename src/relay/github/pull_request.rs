//! One pull request for each branch, opened or updated.
//!
//! Every attempt begins with a search for the branch's open pull request. So a lost answer, a request that arrived
//! twice or a crash cannot lead to a second pull request.
//!
//! **Invariant:** text that people wrote into a pull request stays as it is, byte for byte. The relay changes only the
//! text between its own marks ([`managed_section`]).
//!
//! **Invariant:** work that needs a review never comes to a pull request that is ready to be merged.
//!
//! **Invariant:** an agent's text notifies no person, closes no issue and loads no picture ([`safe_text`]).

pub mod change_summary;
pub mod managed_section;
pub mod safe_text;

use http::Method;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::client::{GithubClient, GithubError, repository_path};
use super::credential::ForgeCredential;
use crate::base::secret::SecretString;
use crate::base::url_component::encode_url_component;
use crate::relay::repo::repository::HostedRepository;
use crate::relay::repo::review::ReviewReason;
use crate::relay::repo::{ObjectId, SandboxBranch};
use change_summary::ChangeSummary;
use managed_section::NOTICE_MARK;

/// The content of a pull request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullRequestSpec {
    /// The branch with the work.
    pub head: SandboxBranch,
    /// The branch to merge into, or `None` for the repository's default branch.
    pub base: Option<String>,
    pub run: String,
    pub agent: String,
    /// The requested title for a new pull request. Without one, the commits give the title. An existing pull request
    /// keeps its title.
    pub title: String,
    /// The agent's description.
    pub body: String,
    /// The commits that the run has moved the branch from and to.
    pub commit_range: (ObjectId, ObjectId),
    /// The facts of the run's work.
    pub summary: ChangeSummary,
    /// True if a person has to review the work before it counts. A new pull request is then a draft.
    pub needs_review: bool,
    /// The reasons for the review.
    pub reasons: Vec<ReviewReason>,
    /// The reasons why a person has to review the branch's earlier commits. A pull request without these reasons in its
    /// text is then made a draft, too.
    pub earlier_reasons: Vec<ReviewReason>,
}

/// A pull request that was opened or updated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedPullRequest {
    pub number: u64,
    pub url: String,
    pub is_new: bool,
}

/// The fields of a pull request that the relay reads.
#[derive(Debug, Deserialize)]
struct FetchedPullRequest {
    number: u64,
    /// The ID in the GraphQL API. Some forges with the same REST API have no GraphQL API.
    #[serde(default)]
    node_id: String,
    #[serde(deserialize_with = "read_page_url")]
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
    /// The branch's repository, or `None` if the repository was a fork that was deleted.
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

/// Updates the branch's open pull request, or opens one.
///
/// # Errors
/// Returns an error if retries within some seconds do not help. [`GithubError::retry_after`] says whether a later
/// attempt may succeed.
pub async fn publish_pull_request(
    api: &GithubClient,
    credential: &ForgeCredential,
    repository: &HostedRepository,
    spec: &PullRequestSpec,
) -> Result<PublishedPullRequest, GithubError> {
    let attempt = |token| async move {
        PullRequestPublisher { api, token, repository, spec }.try_publish().await
    };
    let attempts = || credential.with_token(api, repository, attempt);
    Box::pin(api.retry_policy().retry(attempts)).await
}

/// Converts the open pull requests of a branch to drafts, before work is pushed that needs a review. A pull request
/// with automatic merging could otherwise be merged as soon as the work is there.
///
/// # Errors
/// Returns the errors of [`publish_pull_request`]. The caller must not push the work then.
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

/// Converts all open pull requests of a branch to drafts, in one attempt.
async fn convert_all_to_draft(
    api: &GithubClient,
    token: &SecretString,
    repository: &HostedRepository,
    branch: &SandboxBranch,
) -> Result<(), GithubError> {
    // The order of creation: the list does not change under the pages, because drafts stay in it.
    let mut pages = OpenPullRequests::new(api, token, (repository, branch), "");
    while let Some(page) = pages.next_page().await? {
        for found in page {
            make_draft(api, token, &found).await?;
        }
    }
    Ok(())
}

/// Converts a pull request to a draft, unless it is a draft already.
async fn make_draft(
    api: &GithubClient,
    token: &SecretString,
    found: &FetchedPullRequest,
) -> Result<(), GithubError> {
    if found.draft {
        return Ok(());
    }
    match api.graphql_mutation(token, CONVERT_TO_DRAFT_MUTATION, &found.node_id).await {
        // A forge without drafts has no automatic merging either. The pull request's text asks for the review.
        Err(error) if error.to_string().contains(NO_DRAFTS_MESSAGE) => return Ok(()),
        result => result?,
    }
    tracing::info!(url = found.html_url, "the pull request is a draft again");
    Ok(())
}

/// The open pull requests from a branch, page by page.
struct OpenPullRequests<'a> {
    api: &'a GithubClient,
    token: &'a SecretString,
    repository: &'a HostedRepository,
    branch: String,
    /// The further part of the query.
    filter: &'a str,
    /// The number of pages that were read.
    page: usize,
    has_next: bool,
}

impl<'a> OpenPullRequests<'a> {
    /// Lists the open pull requests from a branch, narrowed by the query's further part `filter`.
    fn new(
        api: &'a GithubClient,
        token: &'a SecretString,
        (repository, branch): (&'a HostedRepository, &SandboxBranch),
        filter: &'a str,
    ) -> Self {
        let branch = branch.to_string();
        Self { api, token, repository, branch, filter, page: 0, has_next: true }
    }

    /// Returns the pull requests of the next page, or `None` after the last one. The answer is filtered again: GitHub
    /// ignores parts of a query that it does not understand, and a fork may have a branch of the same name.
    ///
    /// # Errors
    /// Returns the errors of a call, and [`GithubError::TooManyPullRequests`] if there may be a page behind `MAX_PAGES`.
    async fn next_page(&mut self) -> Result<Option<Vec<FetchedPullRequest>>, GithubError> {
        if !self.has_next {
            return Ok(None);
        }
        if self.page == MAX_PAGES {
            return Err(GithubError::TooManyPullRequests(MAX_PAGES * PER_PAGE));
        }
        self.page += 1;
        let Self { repository, branch, filter, page, .. } = &*self;
        let (owner, name) = (repository.owner(), encode_url_component(branch));
        let query = format!(
            "/pulls?state=open&head={owner}%3A{name}{filter}&per_page={PER_PAGE}&page={page}"
        );
        let path = repository_path(repository, &query);
        let (found, has_next) =
            self.api.get_page::<Vec<FetchedPullRequest>>(self.token, &path).await?;
        // A full page may have a next one, even if a forge does not say so.
        self.has_next = has_next || found.len() >= PER_PAGE;
        let own = format!("{}/{}", self.repository.owner(), self.repository.name());
        let is_own_repository = |home: &BranchRepository| home.full_name.eq_ignore_ascii_case(&own);
        let is_from_branch = |pull: &FetchedPullRequest| {
            pull.head.branch == self.branch
                && pull.head.repo.as_ref().is_some_and(is_own_repository)
        };
        Ok(Some(found.into_iter().filter(is_from_branch).collect()))
    }
}

/// One attempt to publish a pull request.
struct PullRequestPublisher<'a> {
    api: &'a GithubClient,
    token: SecretString,
    repository: &'a HostedRepository,
    spec: &'a PullRequestSpec,
}

impl PullRequestPublisher<'_> {
    /// Opens or updates the pull request, without retries.
    async fn try_publish(&self) -> Result<PublishedPullRequest, GithubError> {
        let base = match &self.spec.base {
            Some(base) => base.clone(),
            None => self.api.repository_info(&self.token, self.repository).await?.default_branch,
        };
        // 1. Search first: an earlier attempt may have opened the pull request and lost the answer.
        if let Some(found) = self.find_open(&base).await? {
            return self.update_pull_request(found).await;
        }
        // 2. None is open: open one. A notice about review makes it a draft from the start.
        let is_draft = self.spec.needs_review || !self.spec.earlier_reasons.is_empty();
        match self.create_pull_request(&base, is_draft).await {
            // 3. Another request has opened one since the search: update that one.
            Err(error)
                if error.has_problem(|reason| reason.message.contains(ALREADY_EXISTS_MESSAGE)) =>
            {
                let found = self.find_open(&base).await?;
                self.update_pull_request(found.ok_or(GithubError::NoResponse(error.to_string()))?)
                    .await
            }
            // 4. Not every plan has drafts. The text asks for the review.
            Err(error) if is_draft && error.to_string().contains(NO_DRAFTS_MESSAGE) => {
                self.create_pull_request(&base, false).await
            }
            created => created,
        }
    }

    /// Returns the open pull request from the branch to `base`.
    async fn find_open(&self, base: &str) -> Result<Option<FetchedPullRequest>, GithubError> {
        let query = format!("&base={}", encode_url_component(base));
        let source = (self.repository, &self.spec.head);
        let mut pages = OpenPullRequests::new(self.api, &self.token, source, &query);
        while let Some(page) = pages.next_page().await? {
            if let Some(found) = page.into_iter().find(|pull| pull.base.branch == base) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Opens a pull request.
    async fn create_pull_request(
        &self,
        base: &str,
        draft: bool,
    ) -> Result<PublishedPullRequest, GithubError> {
        let PullRequestSpec { title, summary, head, .. } = self.spec;
        let title = if title.trim().is_empty() { summary.title() } else { title.clone() };
        let title = safe_text::format_title(&title, &format!("Changes from {head}"));
        let body = managed_section::upsert_section(None, &self.spec.run, &self.body_section(false))
            .unwrap_or_default();
        let head = self.spec.head.to_string();
        let create = CreatePullRequest { title: &title, head, base, body: &body, draft };
        let address = repository_path(self.repository, "/pulls");
        let created: FetchedPullRequest =
            self.api.call_once(&self.token, Method::POST, &address, Some(&create)).await?;
        Ok(PublishedPullRequest { number: created.number, url: created.html_url, is_new: true })
    }

    /// Updates the relay's section in the text of a pull request.
    async fn update_pull_request(
        &self,
        found: FetchedPullRequest,
    ) -> Result<PublishedPullRequest, GithubError> {
        let old = found.body.as_deref();
        let words =
            self.body_section(managed_section::has_notice_of_other_run(old, &self.spec.run));
        // A person who marked the pull request as ready has not seen a notice that is new in this update. So the draft
        // comes first: a failure after it leaves a draft, and never a ready pull request without the notice.
        if words.contains(NOTICE_MARK) && !managed_section::has_notice_of_run(old, &self.spec.run) {
            make_draft(self.api, &self.token, &found).await?;
        }
        let published =
            PublishedPullRequest { number: found.number, url: found.html_url, is_new: false };
        let Some(body) = managed_section::upsert_section(old, &self.spec.run, &words) else {
            // Without room for the notice, the work must not count as published.
            if words.contains(NOTICE_MARK) {
                return Err(GithubError::DescriptionFull(published.url));
            }
            tracing::warn!(
                url = published.url,
                "the pull request's description has no room for the relay's section and was not changed"
            );
            return Ok(published);
        };
        // Nothing to change: an earlier attempt has written the same text.
        if old == Some(body.as_str()) {
            return Ok(published);
        }
        let address = repository_path(self.repository, &format!("/pulls/{}", found.number));
        let update = UpdatePullRequest { body: &body };
        let _: FetchedPullRequest =
            self.api.call_once(&self.token, Method::PATCH, &address, Some(&update)).await?;
        Ok(published)
    }

    /// Returns the text of the run's section: the agent's text as a quote, and the relay's facts below it. If `is_told` is true,
    /// another run's section already has the reasons about the branch's earlier commits.
    fn body_section(&self, is_told: bool) -> String {
        let PullRequestSpec { run, agent, commit_range: (from, to), .. } = self.spec;
        let body = safe_text::format_quote(&self.spec.body);
        let body = if body.is_empty() { body } else { format!("The agent wrote:\n\n{body}\n\n") };
        let run = safe_text::format_code(run);
        let agent = if agent.is_empty() {
            String::new()
        } else {
            format!(" of {}", safe_text::format_code(agent))
        };
        let from = if *from == ObjectId::NONE { "nothing".to_owned() } else { format!("`{from}`") };
        let before = if is_told { &[] } else { self.spec.earlier_reasons.as_slice() };
        let notice = self.review_notice(&run, before);
        let (commits, details) = (self.spec.summary.commit_list(), self.spec.summary.details(*to));
        format!(
            "{body}Run {run}{agent} moved the branch from {from} to `{to}`.{commits}{details}{notice}"
        )
    }

    /// Returns the notice that a review is needed, with its reasons. The notice's headline is the last text that gives
    /// way if there is too little room.
    fn review_notice(&self, run: &str, before: &[ReviewReason]) -> String {
        let PullRequestSpec { needs_review, reasons, .. } = self.spec;
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
            format!("- {path}{}", safe_text::format_sentence(why))
        });
        let left = reasons.len().saturating_sub(MAX_REASONS);
        let more = (left > 0).then(|| format!("- and {left} more"));
        let lines = ["\n".to_owned(), NOTICE_MARK.to_owned(), headline].into_iter();
        lines.chain(listed).chain(more).collect::<Vec<_>>().join("\n")
    }
}

/// Reads the address of a page, which people will open: a web address that is no longer than usual, and without characters
/// that a terminal or a browser would hide or obey.
fn read_page_url<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let url = String::deserialize(deserializer)?;
    let is_web = url.starts_with("https://") || url.starts_with("http://");
    if is_web && url.len() <= MAX_PAGE_URL_BYTES && url.bytes().all(|byte| byte.is_ascii_graphic())
    {
        return Ok(url);
    }
    Err(D::Error::custom(format!(
        "`html_url` is no web address of at most {MAX_PAGE_URL_BYTES} printable characters"
    )))
}

/// The pull requests on one page of a list, with which an answer stays within the client's limit. Our choice.
const PER_PAGE: usize = 20;

/// The most pages of a list: a thousand pull requests. A branch has one for each base. Our choice.
const MAX_PAGES: usize = 50;

/// The longest address of a page, in bytes. Our choice: browsers accept no much longer ones.
const MAX_PAGE_URL_BYTES: usize = 2048;

/// A part of GitHub's message if the branch has an open pull request already.
const ALREADY_EXISTS_MESSAGE: &str = "A pull request already exists";
/// A part of GitHub's message if the repository's plan has no drafts.
const NO_DRAFTS_MESSAGE: &str = "Draft pull requests are not supported";

/// The GraphQL mutation that converts a pull request to a draft. The REST API cannot do that.
const CONVERT_TO_DRAFT_MUTATION: &str = "mutation($id: ID!) { convertPullRequestToDraft(input: {pullRequestId: $id}) { pullRequest { isDraft } } }";

/// The most reasons in a notice. People read further reasons where the work is. Our choice.
const MAX_REASONS: usize = 10;
