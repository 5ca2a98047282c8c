//! Tests of tokens: configured ones, and those that a GitHub app requests.

use std::process::Command;
use std::sync::Arc;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::fakes::github_server::{GithubOperation, InjectedFailure};
use cogni_gateway::relay::github::client::GithubError;
use cogni_gateway::relay::github::credential::{ForgeCredential, GithubApp};
use cogni_gateway::relay::github::pull_request;
use cogni_gateway::relay::repo::repository::RepositoryUrl;
use futures_util::future::join_all;
use http::StatusCode;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;

use super::pull_request::pull_request_spec;
use crate::support::github_server::{NAME, RunningGithub, forge_credential};

/// L6: An app signs with its key, in either key format, and gets a token for exactly that repository and those
/// permissions.
#[tokio::test(flavor = "multi_thread")]
async fn an_app_gets_a_token_for_one_repository() {
    for form in [&["-traditional"][..], &[]] {
        let github = RunningGithub::start().await;
        let app = install_app(&github, form);
        let (api, repository) = (github.api(), github.hosted());
        let token = app.token(&api, &repository).await.unwrap();
        assert_eq!(api.repository_info(&token, &repository).await.unwrap().default_branch, "main");
        let requests = github
            .hub
            .recorded_calls()
            .into_iter()
            .find(|call| call.operation == GithubOperation::AccessToken);
        insta::allow_duplicates! {
            insta::assert_snapshot!(requests.unwrap().body, @r#"{"permissions":{"contents":"write","pull_requests":"write"},"repositories":["site"]}"#);
        }
    }
}

/// L6: One token is used for all calls until shortly before it expires.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_asked_for_once_and_kept() {
    let github = RunningGithub::start().await;
    let app = install_app(&github, &[]);
    let (api, repository) = (github.api(), github.hosted());
    let asking = (0..20).map(|_| app.token(&api, &repository));
    let tokens: Vec<_> = join_all(asking).await.into_iter().map(Result::unwrap).collect();
    assert!(tokens.iter().all(|token| *token == tokens[0]));
    assert_eq!(github.hub.count_calls(GithubOperation::AccessToken), 1);
}

/// L6: A token that would expire during a push is not used.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_near_its_end_is_replaced() {
    let github = RunningGithub::start().await;
    github.hub.set_token_lifetime(240);
    let app = install_app(&github, &[]);
    let (api, repository) = (github.api(), github.hosted());
    let first = app.token(&api, &repository).await.unwrap();
    assert_ne!(first, app.token(&api, &repository).await.unwrap());
}

/// L6: A token that was revoked is replaced within the same call.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_was_taken_back_is_replaced() {
    let github = RunningGithub::start().await;
    let app = install_app(&github, &[]);
    let (api, repository) = (github.api(), github.hosted());
    app.token(&api, &repository).await.unwrap();
    github.hub.revoke_tokens();
    pull_request::publish_pull_request(&api, &app, &repository, &pull_request_spec())
        .await
        .unwrap();
    assert_eq!(github.hub.count_calls(GithubOperation::AccessToken), 2);
}

/// L6: The error of an app that is not installed in a repository says so. Temporary API failures are retried.
#[tokio::test(flavor = "multi_thread")]
async fn the_error_says_why_an_app_gets_no_token() {
    let github = RunningGithub::start().await;
    let api = github.api();
    github.hub.inject(
        GithubOperation::AccessToken,
        InjectedFailure::error_status(StatusCode::BAD_GATEWAY),
        2,
    );
    let app = install_app(&github, &[]);
    app.token(&api, &github.hosted()).await.unwrap();
    let other: RepositoryUrl = format!("{}/acme/other", github.hub.url()).parse().unwrap();
    let error = app.token(&api, other.as_hosted().unwrap()).await.unwrap_err();
    insta::assert_snapshot!(error, @"GitHub has no such repository, or the token has no access to it; check the URL and the token's repositories");
}

/// L6: A token is never sent to a host that does not belong to its API.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_not_for_another_host() {
    let github = RunningGithub::start().await;
    let api = github.api();
    for url in ["https://github.com/acme/site", "https://127.0.0.1.example/acme/site"] {
        let other: RepositoryUrl = url.parse().unwrap();
        let error = forge_credential().token(&api, other.as_hosted().unwrap()).await.unwrap_err();
        assert!(matches!(error, GithubError::OtherHost { .. }), "{error}");
    }
    assert!(github.hub.recorded_calls().is_empty());
}

/// L6: Neither debug output nor an error contains a secret.
#[tokio::test(flavor = "multi_thread")]
async fn no_credential_prints_its_secret() {
    let github = RunningGithub::start().await;
    let app = install_app(&github, &[]);
    let shown = format!("{:?} {app:?}", forge_credential());
    assert_eq!(shown, "Token(***) App(GithubApp { id: \"Iv1.cogni\", .. })");
    let bad = GithubApp::new("1", &SecretString::new("-----BEGIN hunter2")).unwrap_err();
    insta::assert_snapshot!(bad, @"the app's private key cannot be used: it is not a private key in PEM");
}

/// Installs an app with its own key in the one repository.
fn install_app(github: &RunningGithub, form: &[&str]) -> Arc<ForgeCredential> {
    let key = github.place.path().join("key.pem");
    let key = key.to_str().unwrap();
    run_openssl(&["genrsa", "-out", key, "2048"]);
    let pem = if form.is_empty() {
        run_openssl(&["pkcs8", "-topk8", "-nocrypt", "-in", key])
    } else {
        run_openssl(&["rsa", "-traditional", "-in", key])
    };
    let pkcs1 = match PrivateKeyDer::from_pem_slice(pem.as_bytes()).unwrap() {
        PrivateKeyDer::Pkcs1(_) => form,
        _ => &[],
    };
    assert_eq!(pkcs1, form);
    let public = github.place.path().join("public.der");
    let public_path = public.to_str().unwrap();
    run_openssl(&["rsa", "-in", key, "-RSAPublicKey_out", "-outform", "DER", "-out", public_path]);
    github.hub.install_app("Iv1.cogni", &std::fs::read(&public).unwrap(), &[NAME]);
    Arc::new(ForgeCredential::App(Box::new(
        GithubApp::new("Iv1.cogni", &SecretString::new(pem)).unwrap(),
    )))
}

fn run_openssl(arguments: &[&str]) -> String {
    let output = Command::new("openssl").args(arguments).output().expect("install openssl");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}
