// Asks a mesh over gRPC with the stubs that `make stubs` writes.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	tokenloom "tokenloom/gen/tokenloom/v1"
)

const answer = "3 + 4 = 7."

var model = os.Getenv("TOKENLOOM_MODEL")

// request is the chat that each call begins with.
func request() *tokenloom.GenerateRequest {
	message := &tokenloom.ChatMessage{Role: "user", Content: "What is 3 plus 4?"}
	return &tokenloom.GenerateRequest{
		Model:          model,
		Prompt:         &tokenloom.GenerateRequest_Chat{Chat: &tokenloom.ChatPrompt{Messages: []*tokenloom.ChatMessage{message}}},
		SamplingParams: &tokenloom.SamplingParams{Temperature: proto.Float32(0)},
	}
}

// answered returns the text of each sample, the reason of the last end, and the usage.
func answered(ctx context.Context, client tokenloom.InferenceClient, asked *tokenloom.GenerateRequest) ([]string, tokenloom.FinishReason, *tokenloom.Usage, error) {
	stream, err := client.Generate(ctx, asked)
	if err != nil {
		return nil, 0, nil, err
	}
	texts := make([]string, 2)
	var reason tokenloom.FinishReason
	var usage *tokenloom.Usage
	for {
		part, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return texts, reason, usage, nil
		}
		if err != nil {
			return nil, 0, nil, err
		}
		texts[part.Index] += part.Text
		if part.FinishReason != tokenloom.FinishReason_FINISH_REASON_UNSPECIFIED {
			reason = part.FinishReason
		}
		if part.Usage != nil {
			usage = part.Usage
		}
	}
}

func check(ok bool, what string, found ...interface{}) {
	if !ok {
		log.Fatalf("%s: %v", what, found)
	}
}

// checkChats asks for one sample, for two, and for an object of a schema.
func checkChats(ctx context.Context, client tokenloom.InferenceClient) {
	texts, reason, usage, err := answered(ctx, client, request())
	check(err == nil && texts[0] == answer, "a chat", err, texts)
	check(reason == tokenloom.FinishReason_FINISH_REASON_STOP, "its end", reason)
	check(usage.GetPromptTokens() > 0 && usage.GetCompletionTokens() > 0, "its usage", usage)

	two := request()
	two.N = 2
	two.SamplingParams = &tokenloom.SamplingParams{TopK: proto.Uint32(1)}
	texts, _, _, err = answered(ctx, client, two)
	check(err == nil && texts[0] == answer && texts[1] == answer, "two samples", err, texts)

	constrained := request()
	constrained.SamplingParams.MaxTokens = proto.Uint32(64)
	schema := `{"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}`
	constrained.SamplingParams.StructuredOutputs = &tokenloom.StructuredOutputs{Constraint: &tokenloom.StructuredOutputs_Json{Json: schema}}
	texts, _, _, err = answered(ctx, client, constrained)
	var object struct{ Sum *int }
	check(err == nil && json.Unmarshal([]byte(texts[0]), &object) == nil && object.Sum != nil, "a schema", err, texts)
}

// checkLeft cancels a call after its first part.
func checkLeft(ctx context.Context, client tokenloom.InferenceClient) {
	long := request()
	long.IgnoreEos = true
	long.SamplingParams.MaxTokens = proto.Uint32(200)
	ctx, cancel := context.WithCancel(ctx)
	stream, err := client.Generate(ctx, long)
	check(err == nil, "a call to leave", err)
	_, err = stream.Recv()
	check(err == nil, "its first part", err)
	cancel()
	for err == nil {
		_, err = stream.Recv()
	}
	check(status.Code(err) == codes.Canceled, "its end", err)
}

// checkRefused sends a wrong field, and finds its name in the details of the status.
func checkRefused(ctx context.Context, client tokenloom.InferenceClient) {
	wrong := request()
	wrong.SamplingParams.Temperature = proto.Float32(-1)
	_, _, _, err := answered(ctx, client, wrong)
	check(status.Code(err) == codes.InvalidArgument, "the code of an error", err)
	for _, detail := range status.Convert(err).Details() {
		if bad, is := detail.(*errdetails.BadRequest); is {
			check(strings.Contains(bad.FieldViolations[0].Field, "temperature"), "the field of an error", bad)
			return
		}
	}
	log.Fatalf("no BadRequest in %v", status.Convert(err).Details())
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	connection, err := grpc.Dial(os.Getenv("TOKENLOOM_GRPC"), grpc.WithInsecure())
	check(err == nil, "a channel", err)
	defer connection.Close()
	client := tokenloom.NewInferenceClient(connection)
	found, err := client.ListModels(ctx, &tokenloom.ListModelsRequest{})
	check(err == nil && found.Models[0].Name == model, "the models", err, found)
	checkChats(ctx, client)
	checkLeft(ctx, client)
	checkRefused(ctx, client)
	fmt.Println("generated, compiled: models, a streamed chat, two samples, a schema, one left, an error with its field")
}
