//! T8: Tests of budgets that ask: a spent limit becomes a question, a person raises it, and the calls that wait go on.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::process::GatewayProcess;
use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::llm::budget::{
    BudgetLimits, Nanodollars, RaiseError, SpendingLimit, SpendingLimits, Tokens,
};
use cogni_gateway::runner::tool_opener::RunToolOpener;
use cogni_gateway::tools::approval::store::{
    ApprovalDecision, ApprovalFilter, ApprovalStore, DecisionOutcome,
};
use cogni_gateway::tools::approval::{ApprovalRow, ApprovalState, BUDGET_TOOL};
use futures_util::future::join_all;
use http::StatusCode;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::Notify;

use super::approvals::open_store;
use super::{CLOCK, execute_tool, tool_settings};
use crate::support::app::{TestApp, run_config};
use crate::support::client::TestResponse;

/// A run whose budget asks, and the store that the person answers in.
pub(super) struct AskingBudget {
    pub(super) app: TestApp,
    pub(super) store: ApprovalStore,
    _directory: TempDir,
}

impl AskingBudget {
    async fn start(limits: BudgetLimits, table: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let store = open_store(directory.path());
        let opener = RunToolOpener { approvals: Some(store.clone()), ..RunToolOpener::default() };
        let app = TestApp::with(|config| {
            config.budget = limits;
            ask_for_budget(config, table, Some(opener));
        })
        .await;
        Self { app, store, _directory: directory }
    }

    /// Starts a run with a clock that costs more than the run has.
    pub(super) async fn with_unfunded_clock() -> Self {
        let max_cost_usd = Nanodollars::parse("0.001");
        Self::start(BudgetLimits { max_cost_usd, ..BudgetLimits::default() }, PRICED_CLOCK).await
    }

    async fn with_turns(turns: u64) -> Self {
        Self::start(BudgetLimits { max_turns: Some(turns), ..BudgetLimits::default() }, "").await
    }

    async fn chat(&self) -> TestResponse {
        self.app.client().post("/v1/chat/completions", &chat_body()).await
    }

    async fn rows(&self) -> Vec<ApprovalRow> {
        self.store.list(ApprovalFilter { limit: 100, ..ApprovalFilter::default() }).await.unwrap()
    }

    /// Waits until a person is asked, and returns the question. Earlier questions are closed.
    async fn question(&self) -> ApprovalRow {
        loop {
            let pending = |row: &ApprovalRow| row.state == ApprovalState::Pending;
            if let Some(row) = self.rows().await.into_iter().find(pending) {
                return row;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    async fn answer(&self, row: &ApprovalRow, raise: Option<SpendingLimits>) -> DecisionOutcome {
        let is_approved = raise.is_some();
        let decision = ApprovalDecision {
            is_approved,
            digest: row.digest.clone(),
            by: "grant-2".to_owned(),
            reason: None,
            raise,
            standing: None,
            reply: None,
        };
        self.store.decide(&row.id, decision, SystemTime::now()).await.unwrap()
    }

    async fn raise_turns(&self, row: &ApprovalRow, turns: u64) {
        let outcome = self.answer(row, Some(turns_raise(turns))).await;
        assert!(matches!(outcome, DecisionOutcome::Decided(_)), "{outcome:?}");
    }
}

fn ask_for_budget(config: &mut GatewayConfig, table: &str, opener: Option<RunToolOpener>) {
    let table = if table.contains("[approvals]") {
        table.to_owned()
    } else {
        format!("{table}[approvals]\non_budget = 'ask'\n")
    };
    config.tools = ToolSettings {
        table: Some(toml::from_str(&table).unwrap()),
        opener: opener.map(|opener| Arc::new(opener) as _),
        ..tool_settings("")
    };
}

fn turns_raise(turns: u64) -> SpendingLimits {
    SpendingLimits { max_turns: Some(turns), ..SpendingLimits::default() }
}

fn chat_body() -> Value {
    json!({"model": "fake", "max_tokens": 5, "messages": []})
}

fn code(response: &TestResponse) -> (u16, Value) {
    (response.status.as_u16(), response.json()["error"]["code"].clone())
}

/// A turn beyond the limit waits for a person and goes on by the answer. The wait is no turn, and the log says who has
/// raised the limit before the call that goes on.
#[tokio::test]
async fn a_call_beyond_the_budget_waits_and_goes_on() {
    let asking = AskingBudget::with_turns(1).await;
    assert_eq!(asking.chat().await.status, StatusCode::OK);
    let (answered, row) = tokio::join!(asking.chat(), async {
        let row = asking.question().await;
        assert_eq!(asking.app.run.ledger.spent_amount().turns, 1);
        assert_eq!(asking.app.run.ledger.budget_status().open_calls, 0);
        asking.raise_turns(&row, 2).await;
        row
    });
    assert_eq!(answered.status, StatusCode::OK, "{}", answered.text());
    let budget = row.budget.clone().unwrap();
    assert_eq!((budget.limit, budget.spent.turns), (SpendingLimit::MaxTurns, 1));
    assert_eq!((&*row.tool, row.arguments.as_ref()), (BUDGET_TOOL, None));
    let rows = asking.rows().await;
    assert_eq!((rows.len(), rows[0].state), (1, ApprovalState::Consumed));
    assert!(!asking.app.run.ledger.exhausted_token().is_cancelled());
    let AskingBudget { app, _directory, .. } = asking;
    assert_eq!(app.run.ledger.spent_amount().turns, 2);
    let records = app.stop().await;
    let told = records.iter().filter_map(|record| {
        let event = record["event"].as_str().unwrap();
        let is_told = event.starts_with("approval.")
            || event == "budget.raised"
            || event == "request.admitted";
        is_told.then(|| json!([event, record["limit"], record["decision"], record["raised"]]))
    });
    assert_eq!(
        told.collect::<Vec<_>>(),
        [
            json!(["request.admitted", null, null, null]),
            json!(["approval.requested", "max_turns", null, null]),
            json!(["approval.resolved", null, "approved", null]),
            json!(["budget.raised", null, null, {"max_turns": 2}]),
            json!(["request.admitted", null, null, null]),
        ]
    );
}

/// Eight calls that one limit refuses wait for one question. The raise lets exactly as many go on as it pays for; the
/// others ask again. A ninth call is told to come again, and does not end the run.
#[tokio::test]
async fn calls_that_one_limit_refuses_wait_for_one_question() {
    let asking = AskingBudget::with_turns(0).await;
    let ninth = Notify::new();
    let calls = join_all((0..9).map(async |_| {
        let answered = asking.chat().await;
        if code(&answered) == (429, json!("budget_reserved")) {
            ninth.notify_one();
        }
        answered
    }));
    let person = async {
        let first = asking.question().await;
        ninth.notified().await;
        assert_eq!(asking.rows().await.len(), 1);
        asking.raise_turns(&first, 3).await;
        let second = asking.question().await;
        assert_eq!(second.budget.as_ref().unwrap().limits.max_turns, Some(3));
        asking.answer(&second, None).await;
    };
    let (calls, ()) = tokio::join!(calls, person);
    let count = |status| calls.iter().filter(|call| call.status.as_u16() == status).count();
    assert_eq!((count(200), count(429), count(402)), (3, 1, 5));
    assert_eq!(asking.app.run.ledger.spent_amount().turns, 3);
    // A no ends it: the same limit is not asked about again, and the run's budget is exhausted.
    assert_eq!(code(&asking.chat().await), (402, json!("turn_budget_exhausted")));
    assert_eq!(asking.rows().await.len(), 2);
    assert!(asking.app.run.ledger.exhausted_token().is_cancelled());
}

/// Without an answer the call is refused as if no person could be asked.
#[tokio::test]
async fn an_unanswered_call_is_refused_as_before() {
    let plain = TestApp::with(|config| config.budget.max_turns = Some(0)).await;
    let refused = plain.client().post("/v1/chat/completions", &chat_body()).await;
    let limits = BudgetLimits { max_turns: Some(0), ..BudgetLimits::default() };
    let table = "[approvals]\nttl = '1s'\non_budget = 'ask'\n";
    let asking = AskingBudget::start(limits, table).await;
    let unanswered = asking.chat().await;
    assert_eq!((unanswered.status, unanswered.text()), (refused.status, refused.text()));
    assert_eq!(asking.rows().await[0].state, ApprovalState::Expired);
    for app in [&plain, &asking.app] {
        assert!(app.run.ledger.exhausted_token().is_cancelled());
        assert!(app.run.ledger.was_last_call_denied());
    }
    let late = asking.answer(&asking.rows().await[0], Some(turns_raise(9))).await;
    assert_eq!(late, DecisionOutcome::Closed(ApprovalState::Expired));
    assert_eq!(asking.app.run.ledger.spending_limits().max_turns, Some(0));
}

/// A client that leaves leaves its question, and the next call waits for the same answer.
#[tokio::test]
async fn a_question_outlives_its_client() {
    let asking = AskingBudget::with_turns(0).await;
    let gone = tokio::time::timeout(Duration::from_millis(100), asking.chat()).await;
    assert!(gone.is_err());
    let row = asking.question().await;
    let (answered, ()) = tokio::join!(asking.chat(), async {
        assert_eq!(asking.question().await.id, row.id);
        asking.raise_turns(&row, 1).await;
    });
    assert_eq!((answered.status, asking.rows().await.len()), (StatusCode::OK, 1));
    assert_eq!(asking.app.run.ledger.spent_amount().turns, 1);
}

/// One answer may raise several limits; the question about another of them is then closed, and its call goes on.
#[tokio::test]
async fn one_answer_may_raise_two_limits() {
    let limits = BudgetLimits {
        max_turns: Some(1),
        max_total_tokens: Some(Tokens(1)),
        ..BudgetLimits::default()
    };
    let asking = AskingBudget::start(limits, "").await;
    let embedding = json!({"model": "m", "input": "some words that cost more than a token"});
    let client = asking.app.client();
    let both = async {
        tokio::join!(asking.chat(), client.post("/v1/embeddings", &embedding));
    };
    let person = async {
        let row = loop {
            let rows = asking.rows().await;
            if !rows.is_empty() {
                break rows[0].clone();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        let raise = SpendingLimits {
            max_turns: Some(5),
            max_total_tokens: Some(Tokens(100_000)),
            ..SpendingLimits::default()
        };
        let outcome = asking.answer(&row, Some(raise)).await;
        assert!(matches!(outcome, DecisionOutcome::Decided(_)), "{outcome:?}");
    };
    tokio::join!(both, person);
    let limits = asking.app.run.ledger.spending_limits();
    assert_eq!((limits.max_turns, limits.max_total_tokens), (Some(5), Some(Tokens(100_000))));
    assert!(asking.rows().await.iter().all(|row| row.state != ApprovalState::Pending));
}

/// An answer raises the spent limit, adds none, and lowers none. Of 64 racing answers one counts.
#[tokio::test]
async fn an_answer_only_raises_and_counts_once() {
    let limits = BudgetLimits {
        max_turns: Some(0),
        max_output_tokens: Some(Tokens(50)),
        ..BudgetLimits::default()
    };
    let asking = AskingBudget::start(limits, "").await;
    let person = async {
        let row = asking.question().await;
        let none = SpendingLimits::default();
        for (raise, error) in [
            (none, RaiseError::Missing(SpendingLimit::MaxTurns)),
            (
                SpendingLimits { max_output_tokens: Some(Tokens(60)), ..none },
                RaiseError::Missing(SpendingLimit::MaxTurns),
            ),
            (turns_raise(0), RaiseError::NotHigher(SpendingLimit::MaxTurns)),
            (
                SpendingLimits { max_output_tokens: Some(Tokens(40)), ..turns_raise(2) },
                RaiseError::NotHigher(SpendingLimit::MaxOutputTokens),
            ),
            (
                SpendingLimits { max_cost_usd: Some(Nanodollars(9)), ..turns_raise(2) },
                RaiseError::NotLimited(SpendingLimit::MaxCostUsd),
            ),
        ] {
            assert_eq!(asking.answer(&row, Some(raise)).await, DecisionOutcome::WrongRaise(error));
        }
        // A yes that does not say how far, and a no that says so.
        for (is_approved, raise) in [(true, None), (false, Some(turns_raise(2)))] {
            let (digest, by) = (row.digest.clone(), "grant-2".to_owned());
            let decision = ApprovalDecision {
                is_approved,
                digest,
                by,
                reason: None,
                raise,
                standing: None,
                reply: None,
            };
            let outcome = asking.store.decide(&row.id, decision, SystemTime::now()).await.unwrap();
            assert_eq!(outcome, DecisionOutcome::RaiseMismatch);
        }
        let racing =
            join_all((1..=64).map(|turns| asking.answer(&row, Some(turns_raise(turns))))).await;
        let counted: Vec<_> = (1..=64_u64)
            .zip(&racing)
            .filter(|(_, outcome)| matches!(outcome, DecisionOutcome::Decided(_)))
            .map(|(turns, _)| turns)
            .collect();
        assert_eq!(counted.len(), 1);
        counted[0]
    };
    let (answered, turns) = tokio::join!(asking.chat(), person);
    assert_eq!(answered.status, StatusCode::OK, "{}", answered.text());
    let limits = asking.app.run.ledger.spending_limits();
    assert_eq!((limits.max_turns, limits.max_output_tokens), (Some(turns), Some(Tokens(50))));
}

/// A tool's price asks for the run's money, too. A request that waits no longer is told that a person is asked.
#[tokio::test]
async fn a_tool_call_asks_for_the_money_of_the_run() {
    let asking = AskingBudget::with_unfunded_clock().await;
    let call = |wait: &str| execute_tool(&asking.app, json!({"tool": CLOCK, "wait": wait}));
    let (status, told) = call("0s").await;
    assert_eq!((status.as_u16(), &told["error"]["code"]), (429, &json!("budget_pending")));
    let row = asking.question().await;
    let ((status, answered), ()) = tokio::join!(call("1m"), async {
        let raise = SpendingLimits {
            max_cost_usd: Some(Nanodollars(5_000_000)),
            ..SpendingLimits::default()
        };
        let outcome = asking.answer(&row, Some(raise)).await;
        assert!(matches!(outcome, DecisionOutcome::Decided(_)), "{outcome:?}");
    });
    assert_eq!((status, &answered["status"]), (StatusCode::OK, &json!("completed")));
    assert_eq!(asking.app.run.ledger.spent_amount().cost, Nanodollars(2_000_000));
    assert_eq!(asking.rows().await.len(), 1);
}

/// The run ends while a call waits: the question is withdrawn, the call is refused, and a late answer raises nothing.
#[tokio::test]
async fn the_end_of_the_run_withdraws_its_question() {
    let asking = AskingBudget::with_turns(0).await;
    let (answered, row) = tokio::join!(asking.chat(), async {
        let row = asking.question().await;
        asking.app.begin_stop();
        row
    });
    assert_eq!(code(&answered), (402, json!("turn_budget_exhausted")));
    let late = asking.answer(&row, Some(turns_raise(9))).await;
    assert_eq!(late, DecisionOutcome::Closed(ApprovalState::Withdrawn));
    let records = asking.app.stop().await;
    assert!(records.iter().all(|record| record["event"] != "budget.raised"));
}

/// A paused run lets no call begin, although the person has raised the limit meanwhile.
#[tokio::test]
async fn a_raise_does_not_open_a_paused_run() {
    use cogni_gateway::gateway::run::control::RunControlState;

    let asking = AskingBudget::with_turns(0).await;
    let (answered, ()) = tokio::join!(asking.chat(), async {
        let row = asking.question().await;
        asking.app.run.control.set_state(RunControlState::Paused);
        asking.raise_turns(&row, 1).await;
    });
    assert_eq!(code(&answered), (429, json!("run_paused")));
    assert_eq!(asking.app.run.ledger.spent_amount().turns, 0);
}

/// A budget that asks is refused where no person can answer.
#[tokio::test]
async fn a_budget_that_asks_needs_someone_who_answers() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = run_config(directory.path(), ([127, 0, 0, 1], 1).into());
    ask_for_budget(&mut config, "", Some(RunToolOpener::default()));
    let error = GatewayProcess::build_process(config).err();
    insta::assert_snapshot!(error.unwrap(), @"`tools.approvals.on_budget`: no person can answer here; take `on_budget` out, or use `cogni-gateway serve`, where `cogni-gateway approvals` answers");
}

const PRICED_CLOCK: &str = "granted = ['core__get_current_time']
[[rules]]
name = 'clock'
tool = 'core__get_current_time'
price_usd = '0.002'
";
